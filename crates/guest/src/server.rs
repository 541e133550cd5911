//! The listeners. (Connection tracking follows with the control calls.)

use std::{io, net::SocketAddr};

use axum::Router;
use tokio::net::TcpListener;

/// Listens on the address.
///
/// # Errors
/// The address is taken or not ours.
pub async fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    TcpListener::bind(address).await
}

/// Answers on this listener for ever.
///
/// # Errors
/// The listener fails.
pub async fn serve(listener: TcpListener, router: Router) -> io::Result<()> {
    axum::serve(listener, router).await
}
